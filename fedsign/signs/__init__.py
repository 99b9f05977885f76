"""How far the signs of models agree, and those of a round's clients."""
