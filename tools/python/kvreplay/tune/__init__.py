"""`kvreplay tune`: fits policies on some traces and tests them on others."""
