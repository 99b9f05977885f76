"""Recipe on a pretrained language model, fine-tuned by silos."""
