"""How the user's model is called: with substituted weights, chosen BatchNorm statistics, a precision, on several ranks."""
