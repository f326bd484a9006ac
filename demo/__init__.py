"""A tiny LLaVA-1.5 checkpoint that answers right: its pictures, questions, training and evaluation."""
