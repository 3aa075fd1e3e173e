"""The command line, `rowmax explain | lessons | check | tune | demo`. Needs typer and rich (`rowmax[cli]`); nothing else
imports it."""
