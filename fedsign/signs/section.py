"""Keys for sign agreement in the configuration table [results]."""

from fedsign.sections import Table


class SignsKeys(Table):
    """Keys in [results]."""

    signs: bool = False  # record the clients' sign agreement in every round
