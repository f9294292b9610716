// index.json -> Index: as strict as Python's reader of what it reads, and nothing but a kernel's own records is left out.
#include "index.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>

#include "tree.hpp"

namespace aotpack {
namespace {

// Kinds of parameters, in the order in which a signature has them.
const std::vector<std::string> KINDS = {"positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword"};

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

const std::string& checked_digest(const Json& value) {
  if (!is_digest(value.string())) fail(repr(first(value.text, 80)) + " is not a sha256");
  return value.text;
}

bool is_plain_name(const std::string& name) {
  const auto plain = [](unsigned char c) { return c < 0x80 && (std::isalnum(c) || c == '_' || c == '.' || c == '-'); };
  return !name.empty() && name.size() <= 128 && name[0] != '.' && name[0] != '-' && name.find("..") == std::string::npos &&
         std::all_of(name.begin(), name.end(), plain);
}

// As Python's bool() of it.
bool truthy(const Json* value) {
  if (!value) return false;
  switch (value->kind) {
    case Json::Kind::null: return false;
    case Json::Kind::boolean: return value->boolean;
    case Json::Kind::number: return std::strtod(value->text.c_str(), nullptr) != 0;
    case Json::Kind::text: return !value->text.empty();
    default: return !value->list.empty();
  }
}

const Json& object(const Json& value) {
  if (value.kind != Json::Kind::object) fail("expected an object");
  return value;
}

void check_texts(const Json& value) {
  for (const Json& one : object(value).list) one.string();
}

File parse_file(const Json& value) {
  const std::int64_t bytes = value.at("bytes").integer();
  if (bytes < 0) fail("bytes: expected a size, got " + std::to_string(bytes));
  return {checked_digest(value.at("sha256")), bytes};
}

Dim parse_dim(const Json& value, bool is_size) {
  Dim dim;
  const auto number = [](const Json& one) {
    if (one.kind != Json::Kind::number || one.text.find_first_of(".eE") != std::string::npos) fail("not a size or range");
    return saturated(one.text);
  };
  if (value.kind == Json::Kind::list && value.list.size() == 2) {
    dim.low = number(value.list[0]);
    dim.open = value.list[1].kind == Json::Kind::null;
    if (!dim.open) dim.high = number(value.list[1]);
  } else {
    dim.low = dim.high = number(value);
    dim.fixed = true;
  }
  if (is_size && dim.low < 0) fail("not a size or range: it begins at " + text_of(dim.low));
  return dim;
}

std::vector<Expression> expressions(const Json& texts) {
  std::vector<Expression> found;
  for (const Json& text : texts.items()) found.push_back(Expression::parse(text.string()));
  return found;
}

Guard parse_guard(const Json& value) {
  Guard guard;
  guard.path = value.at("path").string();
  if (value.find("dtype")) {
    guard.kind = Guard::Kind::tensor;
    guard.dtype = value.at("dtype").string();
    for (const Json& dim : value.at("dims").items()) guard.dims.push_back(parse_dim(dim, true));
    guard.device = value.at("device").string();
    const Json* layout = value.find("layout");
    if (!layout) guard.layout = "contiguous";
    else if (layout->kind == Json::Kind::text) guard.layout = layout->text.empty() ? "''" : layout->text;
    else guard.strides = expressions(*layout);
    guard.aligned = truthy(value.find("aligned"));
    guard.written = truthy(value.find("written"));
  } else if (value.find("int")) {
    guard.kind = Guard::Kind::integer;
    guard.dims.push_back(parse_dim(value.at("int"), false));
    if (guard.dims[0].fixed) fail(guard.path + ": int takes a range");
  } else {
    guard.value = canonical_scalar(value.at("value"));
  }
  return guard;
}

Guards parse_guards(const Json& value) {
  Guards guards;
  for (const Json& tree : value.at("trees").items()) {
    check_tree(tree);
    guards.trees.push_back(tree);
  }
  for (const Json& leaf : value.at("leaves").items()) guards.leaves.push_back(parse_guard(leaf));
  guards.where = expressions(value.at("where"));
  return guards;
}

Output parse_output(const Json& value) {
  Output output;
  if (const Json* of = object(value).find("view")) {
    output = parse_output(*of);
    output.of_argument = output.kind == Output::Kind::argument;
    if (!output.of_argument && output.kind != Output::Kind::result) fail("a view is of a result or an argument");
    output.kind = Output::Kind::view;
    output.shape = expressions(value.at("shape"));
    output.strides = expressions(value.at("strides"));
    if (output.shape.size() != output.strides.size()) fail("a view has other strides than dims");
    output.offset.push_back(Expression::parse(value.at("offset").string()));
    output.conj = truthy(value.find("conj"));
  } else if (const Json* result = value.find("result")) {
    output.kind = Output::Kind::result;
    output.index = result->integer();
    value.at("dtype").string();
    if (value.at("shape").kind != Json::Kind::null) output.shape = expressions(value.at("shape"));
  } else if (const Json* argument = value.find("argument")) {
    output.kind = Output::Kind::argument;
    output.index = argument->integer();
  } else if (const Json* size = value.find("size")) {
    output.kind = Output::Kind::size;
    output.shape.push_back(Expression::parse(size->string()));
  } else {
    output.value = value.at("value");
    canonical_scalar(output.value);
  }
  return output;
}

Outputs parse_outputs(const Json& value) {
  Outputs outputs;
  outputs.tree = value.at("tree");
  check_tree(outputs.tree);
  for (const Json& leaf : value.at("leaves").items()) outputs.leaves.push_back(parse_output(leaf));
  return outputs;
}

// "sm_90a", "compute_80": what cubins and PTX are for.
bool is_arch(const std::string& text, bool ptx) {
  const std::size_t start = text.rfind("compute_", 0) == 0 ? 8 : !ptx && text.rfind("sm_", 0) == 0 ? 3 : std::string::npos;
  if (start == std::string::npos) return false;
  std::string number = text.substr(start);
  if (!number.empty() && (number.back() == 'a' || number.back() == 'f')) number.pop_back();
  return number.size() >= 2 && number.find_first_not_of("0123456789") == std::string::npos;
}

Target parse_target(const Json& value) {
  Target target{value.at("device").string(), {}};
  const Json& needs = object(value.at("needs"));
  for (std::size_t n = 0; n < needs.keys.size(); ++n) {
    const std::string &name = needs.keys[n], &need = needs.list[n].string();
    if (name == "cubin" && !is_arch(need, false)) fail(repr(first(need, 40)) + " is not an architecture such as sm_90");
    if (name == "ptx" && !is_arch(need.substr(0, need.find(' ')), true)) fail("ptx is " + repr(first(need, 40)));
    if (name == "shared" && (need.empty() || need.size() > 9 || need.find_first_not_of("0123456789") != std::string::npos))
      fail("shared is " + repr(first(need, 40)) + ", expected a number of bytes");
    target.needs.emplace_back(name, need);
  }
  return target;
}

Constants parse_constants(const Json& value) {
  Constants constants;
  for (const Json& pair : value.items()) {
    if (pair.items().size() != 2) fail("a constant is a pair");
    constants.emplace_back(pair.list[0].string(), pair.list[1].string());
  }
  return constants;
}

// What variants have in common, each value read once for each field that it stands for.
template <typename Record>
class Shared {
 public:
  Shared(const Json* values, Record (*read)(const Json&)) : values_(values), read_(read) {}

  std::shared_ptr<const Record> operator()(const Json& value) {
    if (value.kind != Json::Kind::number) return std::make_shared<const Record>(read_(value));
    const std::int64_t place = value.integer();
    const std::size_t count = values_ && values_->kind == Json::Kind::list ? values_->list.size() : 0;
    if (place < 0 || place >= std::int64_t(count)) fail("there is no shared value " + std::to_string(place) + ", only " + std::to_string(count));
    auto& known = known_[place];
    if (!known) known = std::make_shared<const Record>(read_(values_->list[place]));
    return known;
  }

 private:
  const Json* values_;
  Record (*read_)(const Json&);
  std::map<std::int64_t, std::shared_ptr<const Record>> known_;
};

class Reader {
 public:
  explicit Reader(const Json& root)
      : root_(root), targets_(root.find("shared"), parse_target), outputs_(root.find("shared"), parse_outputs),
        constants_(root.find("shared"), parse_constants) {}

  Index whole() {
    Index index;
    const Json &bundle = root_.at("bundle"), &weights = root_.at("weights"), &entries = object(root_.at("entries"));
    bundle.at("name").string();
    bundle.at("version").string();
    check_texts(bundle.at("labels"));
    check_texts(root_.at("requires"));
    for (std::size_t n = 0; n < entries.keys.size(); ++n)
      at("entries." + entries.keys[n], [&] { index.entries.push_back(entry(entries.keys[n], entries.list[n])); });
    const Json& file = weights.at("file");
    if (file.kind != Json::Kind::null) index.weights_file = std::make_unique<File>(parse_file(file));
    const Json& sets = object(weights.at("sets"));
    for (std::size_t n = 0; n < sets.keys.size(); ++n)
      at("weights.sets." + sets.keys[n], [&] { index.sets[sets.keys[n]] = set(sets.list[n]); });
    object(root_.at("provenance"));
    object(root_.at("settings"));
    at("entries", [&] { check_members(index); });
    at("weights", [&] { check_weights(index); });
    return index;
  }

 private:
  static void at(const std::string& place, const std::function<void()>& read) {
    try {
      read();
    } catch (const Error& error) {
      fail(place + ": " + error.what());
    }
  }

  EntryRecord entry(const std::string& name, const Json& value) {
    EntryRecord made;
    made.name = name;
    made.is_kernel = object(value).find("kernel");
    if (made.is_kernel) return made;
    for (const Json& parameter : value.at("parameters").items()) made.parameters.push_back(parse_parameter(parameter));
    check_signature(value.at("parameters"));
    check_texts(value.at("source").at("files"));
    value.at("source").at("text").string();
    object(value.at("source").at("args"));
    object(value.at("fills"));
    value.at("on_miss").at("policy").string();
    object(value.at("verify"));
    check_texts(value.at("operators"));
    for (const Json& item : value.at("imports").items()) item.string();
    value.at("training");
    if (const Json& names = value.at("output_names"); names.kind != Json::Kind::null)
      for (const Json& item : names.items()) item.string();
    for (const char* key : {"variants", "programs"}) {
      const auto& records = value.at(key).items();
      for (std::size_t n = 0; n < records.size(); ++n)
        at(std::string(key) + "[" + std::to_string(n) + "]", [&] {
          VariantRecord found = variant(records[n]);
          check_variant(found, made, records[n].at("examples"));
          (key[0] == 'v' ? made.variants : made.programs).push_back(std::move(found));
        });
    }
    return made;
  }

  static std::string parse_parameter(const Json& value) {
    const std::string &name = value.at("name").string(), &kind = value.at("kind").string();
    if (std::find(KINDS.begin(), KINDS.end(), kind) == KINDS.end()) fail("parameter " + repr(name) + " has unknown kind " + repr(first(kind, 80)));
    static const std::set<std::string> keywords = {
        "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def", "del", "elif", "else",
        "except", "finally", "for", "from", "global", "if", "import", "in", "is", "lambda", "nonlocal", "not", "or", "pass", "raise",
        "return", "try", "while", "with", "yield"};
    const bool good = !name.empty() && !keywords.count(name) && name.rfind("__", 0) != 0 && !std::isdigit(static_cast<unsigned char>(name[0])) &&
                      std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c >= 0x80; });
    if (!good) fail("parameter " + repr(first(name, 80)) + " is not a Python name");
    if (const Json* record = value.find("default")) {
      check_tree(record->at("tree"));
      for (const Json& leaf : record->at("leaves").items()) canonical_scalar(leaf);
      if (has_class(record->at("tree")) || leaf_count(record->at("tree")) != record->at("leaves").list.size())
        fail("the default of " + repr(name) + " cannot be rebuilt");
    }
    return name;
  }

  // They are a signature that Python can have.
  static void check_signature(const Json& parameters) {
    std::set<std::string> names;
    std::ptrdiff_t last = 0;
    bool defaults = false;
    for (const Json& each : parameters.list) {
      const std::string& kind = each.at("kind").text;
      const std::ptrdiff_t place = std::find(KINDS.begin(), KINDS.end(), kind) - KINDS.begin();
      const bool many = kind.rfind("var_", 0) == 0, plain = kind.rfind("positional_", 0) == 0, given = each.find("default");
      if (!names.insert(each.at("name").text).second) fail("duplicate parameter name: " + repr(each.at("name").text));
      if (place < last || (many && place == last)) fail("wrong parameter order: " + kind);
      if (plain && defaults && !given) fail("a parameter without a default follows one with a default");
      if (many && given) fail("*args and **kwargs have no defaults");
      defaults = defaults || (plain && given);
      last = place;
    }
  }

  VariantRecord variant(const Json& value) {
    VariantRecord made;
    const std::string& tier = value.at("tier").string();
    if (tier != "hot" && tier != "warm" && tier != "rare") fail("unknown tier " + repr(first(tier, 80)));
    const Json &artifact = value.at("artifact"), &files = object(artifact.at("files"));
    made.kind = artifact.at("kind").string();
    made.digest = checked_digest(artifact.at("digest"));
    for (std::size_t n = 0; n < files.keys.size(); ++n) {
      if (!is_plain_name(files.keys[n])) fail(repr(first(files.keys[n], 80)) + " is not a plain file name");
      made.files[files.keys[n]] = parse_file(files.list[n]);
    }
    if (value.find("launch") || made.kind == "cubin" || made.kind == "ptx") fail("an entry is a model or a kernel, not both");
    made.id = value.at("id").string();
    value.at("point").string();
    made.target = targets_(value.at("target"));
    made.guards = parse_guards(value.at("guards"));
    made.outputs = outputs_(value.at("outputs"));
    made.weights = value.at("weights").string();
    made.constants = constants_(value.at("constants"));
    if (const Json* recipe = value.find("recipe")) {
      made.recipe_outputs = std::make_shared<const Outputs>(parse_outputs(recipe->at("outputs")));
      const Outputs& outputs = *made.recipe_outputs;
      object(recipe->at("options"));
      for (const Json& item : recipe->at("targets").items()) {
        parse_target(item.at("target"));
        object(item.at("job"));
      }
      if (made.kind != "exported") fail("a recipe belongs to a program");
      if (!(outputs.tree == made.outputs->tree) || outputs.leaves.size() != made.outputs->leaves.size())
        fail("a recipe gives other outputs than its program");
    }
    return made;
  }

  static WeightSetRecord set(const Json& value) {
    WeightSetRecord made;
    const Json& weights = object(value.at("weights"));
    for (std::size_t n = 0; n < weights.keys.size(); ++n) {
      WeightRef ref{weights.list[n].at("tensor").string(), {}};
      if (const Json* order = weights.list[n].find("order")) {
        std::set<std::int64_t> axes;
        for (const Json& axis : order->items()) {
          axes.insert(axis.integer());
          ref.order.push_back(std::size_t(axis.integer()));
        }
        if (axes.size() != ref.order.size() || (!axes.empty() && (*axes.begin() != 0 || *axes.rbegin() != std::int64_t(axes.size()) - 1)))
          fail("the order of " + repr(weights.keys[n]) + " is no permutation of its dims");
      }
      if (const Json* host = weights.list[n].find("host"); host && host->kind != Json::Kind::boolean) fail("host: expected true or false");
      made.weights[weights.keys[n]] = std::move(ref);
    }
    for (const Json& name : value.at("state").items()) made.state.push_back(name.string());
    value.at("dtype").string();
    return made;
  }

  const Json& root_;
  Shared<Target> targets_;
  Shared<Outputs> outputs_;
  Shared<Constants> constants_;
};

}  // namespace

Index Index::parse(const std::string& text) {
  try {
    const Json root = Json::parse(text);
    if (root.kind != Json::Kind::object || !root.find("format")) fail("has no 'format': this is not an aotpack index");
    const Json& format = root.at("format");
    const bool known = format.kind == Json::Kind::number && (format.text == "1" || format.text == "2" || format.text == "3");
    if (!known) fail("format version is " + first(format.text, 40) + ", this client reads 1, 2, 3");
    return Reader(root).whole();
  } catch (const Error& error) {
    fail(std::string("index.json: ") + error.what());
  }
}

}  // namespace aotpack
