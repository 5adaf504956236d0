package env

// Environ renders the values that do not come from defaults as NAME=value, which
// LoadFrom reads again. Each is under its main name; NAME= is one that the
// program has made unset.
func (c *Config) Environ() []string {
	var list []string
	for i := range table {
		v := &table[i]
		if v.name == vanType || c.Origin(v.name) == fromDefault {
			continue // DMLC_ENABLE_RDMA has the same value, and precedence
		}
		list = append(list, v.name+"="+v.get(c))
	}
	return list
}
