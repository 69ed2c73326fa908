"""How `thinwire.attach` connects an optimizer to a model: to DistributedDataParallel, and to FSDP2."""
