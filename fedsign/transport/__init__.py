"""How the processes of FedSign talk to each other: framed JSON messages over stream sockets, and tensors in shared memory."""
