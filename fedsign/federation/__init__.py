"""What travels between server and clients: how it is encoded, checked, accounted for and averaged."""
