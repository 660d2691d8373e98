"""Figures for people, folded with the state. No decision reads them."""
