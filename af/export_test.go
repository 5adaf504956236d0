package af

// Early is how many messages wait for those before them, by the server's count.
func (s *TensorServer) Early() int { return int(s.early.Load()) }
