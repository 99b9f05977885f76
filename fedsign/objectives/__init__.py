"""Local objectives, one file each: what a client minimizes besides the task's loss."""
