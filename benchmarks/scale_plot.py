def draw(found, path):
    pass
