"""The client side: training, client state on disk, and the Flower ClientApp."""
