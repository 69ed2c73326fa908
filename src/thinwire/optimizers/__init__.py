"""One file per paper: the state that it keeps, what it sends, and how it applies the answer."""
