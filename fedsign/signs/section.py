"""What counting signs adds to the configuration's table [results]."""

from fedsign.sections import Table


class SignsKeys(Table):
    """In [results]."""

    signs: bool = False  # how far the clients' signs agree, in every round
