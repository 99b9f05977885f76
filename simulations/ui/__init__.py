"""`fedsign ui`: runs and comparisons in the browser, live while they run.

Everything on disk is untrusted: it is read with limits, without following links, and sent to the page as text.
"""
