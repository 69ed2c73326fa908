"""`thinwire bench step`: training steps over shaped links, for what people use today and for thinwire's optimizers."""
