"""A pretrained language model fine-tuned by silos."""
