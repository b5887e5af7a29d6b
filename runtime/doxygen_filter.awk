#!/usr/bin/awk -f
# Makes Doxygen's comments of a header's plain ones: those before a declaration, and those behind one. The
# first comment is the header's own.
function escaped(text) {
  gsub(/[\\@<>#%&$]/, "\\\\&", text)
  return text
}
BEGIN { own = 1 }
own && /^\/\/ / { if (!begun) print "/// \\file"; begun = 1; print "/// " escaped(substr($0, 4)); next }
own && /^\/\/$/ { print "///"; next }
own { own = 0 }
/^ *\/\/ / { at = index($0, "//"); print substr($0, 1, at - 1) "/// " escaped(substr($0, at + 3)); next }
/^ *\/\/$/ { sub(/\/\//, "///"); print; next }
/[;,{] +\/\/ / && !/^ *}/ { at = index($0, "// "); print substr($0, 1, at - 1) "///< " escaped(substr($0, at + 3)); next }
{ print }
