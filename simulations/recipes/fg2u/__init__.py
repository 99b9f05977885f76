"""(FG)²U and what hypergradients are used for: condensation, coefficients of a PDE, online adaptation, FedSign's gamma."""
