"""Other frameworks' interfaces over engram's stores, a module each: nothing of engram imports them."""
