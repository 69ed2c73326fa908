"""How packed vectors get to the other ranks: layout, packets, the two rounds, and the lanes that run them."""
