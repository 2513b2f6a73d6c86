"""Whatever bytes come, the parsers answer with a message or an error of the tree, soon and with little memory."""
