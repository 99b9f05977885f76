"""How a model's start, its learning rates and its passes depend on its width and its density."""
