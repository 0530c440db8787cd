"""Training: `Engine`, its optimizer pass, the training loop, its events and reports."""
