"""Recipes on LISA, compared with LoRA, GaLore and full fine-tuning."""
