"""Answer quality: fictional questions with one right answer, scores, divergence from full recompute, a judge."""
