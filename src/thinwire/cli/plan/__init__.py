"""`thinwire plan` and `thinwire simulate`: what helps on a model and a network, before anything is changed."""
