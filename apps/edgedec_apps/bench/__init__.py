"""Speed measured: plain and drafted decoding in turn, summed up in rows and a table."""
