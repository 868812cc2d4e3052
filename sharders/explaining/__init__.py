"""Reports on plans without a console: tables of text, explanations, and a page in HTML."""
