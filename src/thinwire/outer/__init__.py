"""The outer exchange of local steps: what `thinwire.LocalSteps` is made of."""
