"""Log-likelihood by position over long texts: ``kvacc_longtext``."""
