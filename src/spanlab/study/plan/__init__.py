"""The analysis `plan`: the least memory, the highest load and the best split that meet latency targets."""
