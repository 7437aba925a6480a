"""Small managers in the designs of released ones, at depth ``events``, under their promises."""
