"""Does it train as well? A study of all optimizers on real data, that can be stopped and gone on with."""
