"""Looking at what a run, a checkpoint or a file of weights has learnt: what `fedsign analyse` does."""
