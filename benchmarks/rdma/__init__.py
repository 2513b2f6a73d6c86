"""How fast data goes by RDMA, beside the best of bare verbs in the same guest. ``make bench-rdma`` runs it there."""
