"""Accuracy of compression: paired training runs and tests of equivalence with dense training."""
