"""Projects: `fedsign new` makes a folder with an experiment of one's own; `flwr run` runs it as a Flower app."""
