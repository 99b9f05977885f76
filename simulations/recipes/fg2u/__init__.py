"""(FG)²U and applications of hypergradients: condensation, PDE coefficients, online adaptation, FedSign's gamma."""
