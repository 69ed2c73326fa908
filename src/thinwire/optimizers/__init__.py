"""One file a paper: what it keeps, what it sends, and what it does with the answer."""
