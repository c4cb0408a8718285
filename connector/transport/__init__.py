"""The data plane behind one seam: NIXL, and a loopback that really copies bytes within one process."""
