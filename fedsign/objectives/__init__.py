"""Local objectives, one file each: what a client minimises besides the task's loss."""
