"""How fast data goes by RDMA, beside the best that bare verbs do in the same guest. ``make bench-rdma`` runs it there."""
