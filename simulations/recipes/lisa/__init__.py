"""LISA, beside LoRA, GaLore and full fine-tuning."""
