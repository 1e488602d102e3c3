"""`regard translate --in FILE --out FILE`: large files, translated in resumable parts."""
