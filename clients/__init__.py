"""The clients' side: training, client state on disk, the Flower ClientApp."""
