"""Shell completion: the scripts of bash, zsh, and fish, and the answers to them, from a generated table."""
