package env

// The description of one variable.

// Kind is how the text of a variable is read.
type Kind int

// Kinds of variables.
const (
	Int          Kind = iota // decimal integer with a range
	Switch                   // integer, 0 is off and all others on
	String                   // text, blanks around it dropped
	Path                     // text, every byte counts
	Seconds                  // integer number of seconds
	Milliseconds             // integer number of milliseconds
	Percent                  // integer from 0 to 100
	Size                     // number of bytes: an integer, with K, M or G behind it for powers of 1024
	Enum                     // one of a few words
	List                     // words with commas between them
	Hidden                   // text that is never shown
)

// String names the kind as the documentation does.
func (k Kind) String() string {
	return [...]string{"integer", "switch", "text", "path", "seconds", "milliseconds", "percent", "size", "word", "list", "secret text"}[k]
}

// variable is one row of the table.
type variable struct {
	name    string
	aliases []string // other spellings; messages use name
	topic   string   // of its section
	kind    Kind
	min     int // of numbers
	max     int
	def     string   // default as it would be written; "" is unset
	words   []string // of Enum
	help    string
	needed  bool // by every node

	// field points into a Config: *int, *bool, *string, *[]string,
	// *time.Duration, *BusyPoll or *Secret.
	field func(*Config) any
	none  int // an *int or *time.Duration field's value for unset, when def is ""

	// check normalises a String, Enum or List value; a want that is not empty
	// says why it was refused.
	check func(string) (value, want string)
}

// spellings lists the name and its aliases.
func (v *variable) spellings() []string { return append([]string{v.name}, v.aliases...) }

func find(name string) *variable {
	for i := range table {
		if table[i].name == name {
			return &table[i]
		}
	}
	return nil
}
