"""Sign agreement between models, and between the clients of a round."""
