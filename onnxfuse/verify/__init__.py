"""Are the outputs still right: inputs to judge by, the reference, figures and limits."""
