"""Native reductions: N inputs and one output in one pass, on worker threads that do not hold the GIL."""
