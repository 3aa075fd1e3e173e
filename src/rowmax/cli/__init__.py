"""The command line, `rowmax explain | check | demo`. Needs typer and rich (`rowmax[cli]`); nothing else imports it."""
